r"""Upload and restore by us, boto3, obstore and s3torchconnector, on one server in one run.

    python benchmarks/s3.py [--size 256MiB] [--rounds 5] [--threads 2,4,8] [--server rclone|moto] \
        [--record FILE]

Everything goes from memory and to memory; boto3's file methods get a file in /dev/shm. Arms are
interleaved in random order within each round. Each peer is measured at several settings and counted
at its best. Peers that are not installed, or fail on this server, are left out and named.
"""

from __future__ import annotations

import argparse
import io
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import record

from iobench.testing import LocalS3, local_s3, moto_s3
from iobench.units import MIB, parse_size
from iobench.writers.image import FileImage
from iobench.writers.registry import make

KEY = "object"
OUR_KEY = "object-with-checksum"
PEERS_KEY = "object-without-checksum"
"""What ours and what the peers restore. rclone answers ranges with status 200, and boto3 then
compares the bytes of a range with the checksum of the whole object, if it has one."""
SEGMENTS = 16
Arm = Callable[[], object]


class Bench:
    """The arms, and the rates that they reached, by operation and tool."""

    def __init__(self, server: LocalS3, size: int) -> None:
        self.server, self.size = server, size
        self.each = size // SEGMENTS
        rng = np.random.default_rng()
        self.data = [rng.integers(0, 256, self.each, np.uint8) for _ in range(SEGMENTS)]
        self.room = [np.zeros(self.each, np.uint8) for _ in range(SEGMENTS)]
        self.joined = np.concatenate(self.data)
        self.file = Path("/dev/shm") / f"iobench-s3-{os.getpid()}"
        self.file.write_bytes(self.joined.data)
        self.back = self.file.with_suffix(".back")
        self.arms: dict[tuple[str, str, str], Arm] = {}
        self.rates: dict[tuple[str, str, str], list[float]] = {}

    def add(self, operation: str, tool: str, setting: str, arm: Arm) -> None:
        self.arms[operation, tool, setting] = arm

    def run(self, rounds: int, seed: int, samples: record.Record) -> None:
        order = random.Random(seed)
        for turn in range(rounds + 1):  # the first one warms up and is not counted
            for operation in ("upload", "restore"):
                arms = [(name, arm) for name, arm in self.arms.items() if name[0] == operation]
                order.shuffle(arms)
                for name, arm in arms:
                    began = time.perf_counter()
                    try:
                        arm()
                    except Exception as error:
                        if turn or name[1] == "iobench s3":
                            raise
                        print(f"left out: {' '.join(name)} fails here ({error})")
                        del self.arms[name]
                        continue
                    elapsed_s = time.perf_counter() - began
                    if turn:
                        self.rates.setdefault(name, []).append(self.size / elapsed_s / MIB)
                        samples.sample(" ".join(name), turn - 1, elapsed_s, bytes=self.size)

    def report(self) -> None:
        best: dict[tuple[str, str], tuple[float, str]] = {}
        for (operation, tool, setting), rates in sorted(self.rates.items()):
            median = statistics.median(rates)
            shown = " ".join(f"{rate:.0f}" for rate in rates)
            print(f"{operation:8} {tool:18} {setting:28} {median:7.0f} MiB/s   ({shown})")
            best[operation, tool] = max(best.get((operation, tool), (0.0, "")), (median, setting))
        for (operation, tool), (rate, setting) in best.items():
            if tool != "iobench s3":
                ours = best[operation, "iobench s3"][0]
                print(f"ratio    {operation:8} ours / {tool} ({setting}): {ours / rate:.2f}")


def ours(bench: Bench, threads: list[int], checksum: str = "crc64nvme") -> None:
    for count in (1, *threads):
        # One request for all of it is what serves a server best whose every request is slow.
        for part in ("8MiB", "16MiB") if count > 1 else (f"{bench.size}B",):
            writer = make("s3", threads=count, part_size=part, checksum=checksum)
            save, restore = FileImage.of(OUR_KEY, bench.data), FileImage.of(OUR_KEY, bench.room)
            name = f"{count} x {part}"
            bench.add(
                "upload",
                "iobench s3",
                name,
                lambda w=writer, i=save: w.write(i, bench.server.target),
            )
            bench.add(
                "restore",
                "iobench s3",
                name,
                lambda w=writer, i=restore: w.read(i, bench.server.target),
            )


def boto3_arms(bench: Bench, threads: list[int]) -> None:
    import boto3
    from boto3.s3.transfer import TransferConfig
    from botocore.config import Config

    plain = boto3.client("s3")
    boto3.client("s3", config=Config(request_checksum_calculation="when_required")).upload_file(
        str(bench.file), bench.server.bucket, PEERS_KEY
    )
    unsigned = boto3.client(
        "s3", config=Config(s3={"payload_signing_enabled": False}, max_pool_connections=64)
    )
    for label, client in (("", plain), (", unsigned", unsigned)):
        for count in threads:
            config = TransferConfig(max_concurrency=count, multipart_chunksize=16 * MIB)
            bench.add(
                "upload",
                "boto3 upload_file",
                f"{count} x 16MiB{label}",
                lambda s3=client, c=config: s3.upload_file(
                    str(bench.file), bench.server.bucket, KEY, Config=c
                ),
            )
            bench.add(
                "restore",
                "boto3 download_file",
                f"{count} x 16MiB{label}",
                lambda s3=client, c=config: s3.download_file(
                    bench.server.bucket, PEERS_KEY, str(bench.back), Config=c
                ),
            )


def obstore_arms(bench: Bench, threads: list[int]) -> None:
    import obstore
    from obstore.store import S3Store

    store = S3Store(
        bench.server.bucket,
        endpoint=bench.server.endpoint_url,
        access_key_id=bench.server.access_key,
        secret_access_key=bench.server.secret_key,
        region="us-east-1",
        virtual_hosted_style_request=False,
        client_options={"allow_http": True, "timeout": "300s"},
    )
    starts = range(0, bench.size, 16 * MIB)
    ends = [min(start + 16 * MIB, bench.size) for start in starts]
    for count in threads:
        bench.add(
            "upload",
            "obstore",
            f"{count} x 16MiB",
            lambda c=count: obstore.put(
                store,
                KEY,
                io.BytesIO(bench.joined.data),
                use_multipart=True,
                chunk_size=16 * MIB,
                max_concurrency=c,
            ),
        )
    bench.add("restore", "obstore", "one get", lambda: obstore.get(store, PEERS_KEY).bytes())
    bench.add(
        "restore",
        "obstore",
        "get_ranges of 16MiB",
        lambda: obstore.get_ranges(store, PEERS_KEY, starts=list(starts), ends=ends),
    )


def s3torchconnector_arms(bench: Bench, _threads: list[int]) -> None:
    from s3torchconnector import S3ClientConfig
    from s3torchconnector._s3client import S3Client

    for part in (8, 16):
        client = S3Client(
            "us-east-1",
            endpoint=bench.server.endpoint_url,
            s3client_config=S3ClientConfig(
                part_size=part * MIB, force_path_style=True, throughput_target_gbps=100
            ),
        )

        def upload(client: Any = client) -> None:
            with client.put_object(bench.server.bucket, KEY) as stream:
                for piece in bench.data:
                    stream.write(piece.data)

        def restore(client: Any = client) -> None:
            reader = client.get_object(bench.server.bucket, PEERS_KEY)
            for piece in bench.room:
                view = memoryview(piece)
                done = 0
                while done < len(view):
                    done += reader.readinto(view[done:])

        bench.add("upload", "s3torchconnector", f"{part}MiB", upload)
        bench.add("restore", "s3torchconnector", f"{part}MiB", restore)


def _resident(which: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(which):
            return int(line.split()[1]) * 1024
    return 0


def memory(target: str, size: int) -> None:
    """Peak memory of ours above what was resident before, against parts in flight x part size.

    In a process of its own, where no memory freed by other arms is reused.
    """
    threads, part = 4, 8 * MIB
    writer = make("s3", threads=threads, part_size=part)
    data = np.random.default_rng().integers(0, 256, size, np.uint8)
    room = np.ones(size, np.uint8)
    writer.write(FileImage.of("small", [data[:1000]]), target)

    def stream() -> None:
        with writer.open(f"{target}/{KEY}") as file:
            file.write(data)

    calls: dict[str, Arm] = {
        "upload": lambda: writer.write(FileImage.of(KEY, [data]), target),
        "restore": lambda: writer.read(FileImage.of(KEY, [room]), target),
        "stream": stream,
    }
    for name, call in calls.items():
        Path("/proc/self/clear_refs").write_text("5")
        before = _resident("VmRSS")
        call()
        extra = (_resident("VmHWM") - before) / MIB
        print(f"memory   {name}: {extra:.1f} MiB extra at {threads} x {part // MIB} MiB in flight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="256MiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", default="2,4,8")
    parser.add_argument("--server", choices=("rclone", "moto"), default="rclone")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    record.add_option(parser)
    asked = parser.parse_args()
    if asked.memory_of:
        memory(asked.memory_of, parse_size(asked.size))
        return
    threads = [int(count) for count in asked.threads.split(",")]
    running = {"rclone": local_s3, "moto": moto_s3}[asked.server]
    with running() as server, server.active():
        bench = Bench(server, parse_size(asked.size) // SEGMENTS * SEGMENTS)
        try:
            ours(bench, threads)
            for add in (boto3_arms, obstore_arms, s3torchconnector_arms):
                try:
                    add(bench, threads)
                except ImportError as error:
                    print(f"left out: {add.__name__.removesuffix('_arms')} ({error})")
            with record.Record(asked.record, target=bench.file.parent) as samples:
                bench.run(asked.rounds, asked.seed, samples)
            bench.report()
            same = all(np.array_equal(a, b) for a, b in zip(bench.data, bench.room, strict=True))
            print("bytes    " + ("as they were" if same else "WRONG"), flush=True)
            again = [sys.executable, __file__, "--memory-of", server.target, "--size", asked.size]
            subprocess.run(again, check=True)
        finally:
            bench.file.unlink()
            bench.back.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
