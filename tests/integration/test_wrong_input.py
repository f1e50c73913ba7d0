"""Wrong input of every verb: exit code 2 and one line with the verb, what is wrong and the way
out. Nothing is printed on stdout, and nothing is written."""

import os
import shutil
from pathlib import Path

import pytest
from support.cli import app
from typer.main import get_command

_RECORD = Path(__file__).parents[2] / "results/reference-llama7b.jsonl"
_TRAINING = _RECORD.with_name("reference-train-gpt5b-nemo.jsonl")
_TINY = Path(__file__).with_name("tiny.yaml")
_HAND = "--save 30s --restore 30s"

CASES = {
    "run --numjobs 0": "--numjobs 0: must be a number from 1 to 256",
    "run --restore-as half": "--restore-as half: must be same, or tp=RANKS",
    "run --workload lama7b": "unknown workload 'lama7b'; did you mean 'llama7b'?\n",
    "run --precision 5%": "No such option: --precision; see",  # nor is a hidden one proposed
    "train --repeat auto": "--repeat auto: must be a valid integer; see",
    "run --background yes": "--background yes: must be none or restore",
    "run -o run.jsonl": "run.jsonl exists and is not overwritten; choose another name",
    "run --dry-run -o run.jsonl": "run.jsonl exists and is not overwritten",
    "train -o run.jsonl": "run.jsonl exists and is not overwritten",
    "run -o run.jsonl/x.jsonl": "run.jsonl is not a directory",
    "run --s3-local --writer s3 --target empty": "--s3-local",
    "run --writer odirect --target s3://bucket/run": "use --writer s3",
    "run --writer s3 --target .": "needs a target s3://bucket/prefix",
    "run -o missing/x.jsonl": "-o missing/x.jsonl: there is no directory missing; make it first",
    "show run.jsonl -o page.txt --format html": "-o page.txt: the name must end with .html",
    "run text.txt": "text.txt is neither a workload (*.yaml) nor a checkpoint",
    "run --rank -1": "--rank -1: must be greater than or equal to 0; see iobench run --help",
    "run --writer odirec": "unknown writer 'odirec'; did you mean 'odirect'? Known: ",
    "run --writer buffered,treads=2": "unknown option 'treads'; did you mean 'threads'? Known: ",
    "run --writer=": "an empty name between commas",
    "run -w missing.yaml": "missing.yaml: cannot be read: No such file or directory",
    "run -w synthetic-1t --rank 3071": "rank 3071 writes no files; choose another",
    "run -w llama7b bloom-3b": "two workloads are given",
    "run --rank 9": "workload 'llama7b' has no rank 9: it has 0 to 7",
    "run --seed 4294967296": "--seed 4294967296: must be less than or equal to 4294967295",
    "run --size lots": "--size 'lots' is not a size; write 4096, 64k, 16MiB, 4GiB or 5GB",
    "run --size 1k": "cannot be scaled to 1.00 KiB: the smallest is",
    "run --repeat many": "--repeat 'many': give a number",
    "run --format xml": "--format xml: choose table, json, csv, md or html",
    "run --reapet 3": "No such option: --reapet (Possible options: --format, --repeat, --target)",
    "run --duration soon": "--duration 'soon' is not a time; write 500ms, 90s, 2min, 1h or 3d",
    "run --duration 0s": "--duration 0s: must be above zero",
    "run --duration 1s --max-bytes much": "--max-bytes 'much' is not a size",
    "run --until dawn": "--until 'dawn': choose steady",
    "run --until steady --repeat 3": "--repeat: --duration and --until repeat saves for a time",
    "run --duration 1min --fio": "--fio: --duration and --until repeat saves for a time",
    "run --max-bytes 1GiB": "--max-bytes: only --duration and --until have it",
    "run --duration 1s --max-bytes 1k --size 16MiB --writer buffered": "choose a smaller --size",
    "run --dry-run -v": "-v: --dry-run makes no report; leave out -v",
    "run -v --format csv": "-v: --format csv has all details; leave out -v",
    "run --writer buffered --baseline buffered": "--baseline: there is nothing else to compare",
    "run --serializer=": "--serializer '': a value is missing between the commas",
    "run --granularity=": "--granularity '': a value is missing between the commas",
    "run --target file:///tmp": "file:// is not known; give a directory, or s3://bucket/prefix",
    "run --rules mlpref": "unknown rules 'mlpref'; did you mean 'mlperf'?",
    "run --rules mlperf --repeat 3": "--repeat: --rules mlperf sets it; leave out --repeat",
    "run --rules mlperf --writer odirect,hybrid --size 8MiB": "measures one writer in one target",
    "autotune --objective speed": "--objective speed: choose save, restore",
    "autotune --max-time 10": "--max-time '10' has no unit",
    "autotune --max-time 0s": "--max-time must be above zero, and is 0s",
    "autotune --max-bytes 0": "--max-bytes must be above zero, and is 0",
    "autotune --max-cpu lots": "--max-cpu lots: must be a valid number",
    "autotune -o text.txt": "-o text.txt: exists and is not a writer's file",
    "autotune -o my.toml": "-o my.toml: exists; choose another name, or remove it",
    "autotune --resume run.jsonl": "run.jsonl is an iobench result file, not a journal",
    "autotune --resume nope.jsonl": "nope.jsonl: no such file",
    "autotune --journal run.jsonl": "exists and is not overwritten; go on with it by --resume",
    "autotune --writer peer:dcp": "unknown writer 'peer:dcp'. Known: aiofiles",
    "autotune --max-bytes 8MiB --size 4MiB": "--max-bytes is too small to compare hybrid with one",
    "autotune --max-memory 0": "--max-memory must be above zero",
    "autotune --max-cpu nan": "--max-cpu must be above zero and finite, and is nan",
    "autotune -o /nowhere/writer.toml": "there is no directory /nowhere; make it first",
    "autotune --resume x --dry-run --max-time 3min": "leave out --max-time, --dry-run",
    "train --every 0": "--every 0: give a number of steps (20)",
    "train --mode none": "--mode none: saves nothing; add sync",
    "train --target s3://bucket": "s3://bucket: is a bucket",
    "train --writer peer:safetensors": "cannot save a training state; peer:torch-save and",
    "train --device tpu": "--device tpu: choose cpu or cuda",
    "train --mode often": "--mode 'often': choose none, sync, async, lazy, memory or spill",
    "train --mode sync=2": "--mode 'sync=2': choose none, sync, async, lazy, memory or spill",
    "train --steps 3 --every 4": "--steps 3: fewer than --every 4",
    "train --steps 1 --every 1": "a checkpoint needs a step before and after it",
    "train --every often": "give a number of steps (20), so many persist times (2xpersist), or",
    "train --every 2xpersist --mode sync": "add async to --mode",
    "train -w tiny.yaml --size full --simulate-step": "'tiny' has no published step time",
    "plan": "give --nodes: the nodes of the job",
    f"plan --nodes 0 {_HAND}": "--nodes 0: write 2048, 64,512,2048",
    "plan --nodes 4 --save 30s": "give --results FILE, or times by hand: --save and --restore",
    "plan --nodes 4 --results nope.jsonl": "nope.jsonl: no such file; iobench writes its records",
    f"plan --nodes 4 {_HAND} --restart soon": "is not a time",
    f"plan --nodes 64-8 {_HAND}": "the smaller number comes first",
    f"plan --nodes 2,048 {_HAND}": "without thousands separators",
    f"plan --nodes 4 {_HAND} --step 0s": "--step must be above zero seconds",
    f"plan --nodes 4 {_HAND} --interval 0s": "--interval must be above zero seconds",
    f"plan --nodes 4 {_HAND} --failures-per-1000-node-days 0": "-1000-node-days must be",
    f"plan --nodes 4 {_HAND} --size 3GiB": "--size: only --results has samples",
    f"plan --nodes 4 {_HAND} --results run.jsonl": "--save, --restore: --results has the",
    "plan --nodes 4 --results run.jsonl --size 0": "--size 0: a node saves more than 0",
    "show": "Missing argument 'RECORD...'; see iobench show --help",
    "show nope": "nope: no such file; iobench writes its records under results/",
    "show text.txt": "text.txt, line 1: not JSON; give a .jsonl file that iobench wrote",
    "show empty": "empty is a directory; give a result file (.jsonl)",
    "show run.jsonl --format pdf": "--format pdf: choose table, md",
    "show run.jsonl run.jsonl": "--format table shows one record; give one",
    "show run.jsonl -o a.png --chart rate-saves": "unknown chart 'rate-saves'; did you mean",
    "report run.jsonl": "Missing option '-o' / '--output'; see iobench report --help",
    "compare run.jsonl": "one run is given; write iobench compare OLD NEW",
    "compare run.jsonl run.jsonl": "the same run is on both sides; give two",
    "compare run.jsonl same.jsonl": "the same run is on both sides; give two",
    "compare run.jsonl train.jsonl": "is a record of iobench train; give records of",
    "compare a b c": "-- must be given once, between the sides",
    "compare a -- b -- c": "-- must be given once, between the sides",
    "compare a --": "each side needs a run",
    "compare run.jsonl run.jsonl -- same.jsonl": "same run twice",
    "compare run.jsonl empty": "empty has no result files (*.jsonl)",
    "compare run.jsonl text.txt --threshold 5": "--threshold '5' is not a percentage; write 5%",
    "reproduce hybridio": "unknown claim 'hybridio'; did you mean 'hybrid-io'",
    "reproduce async --results nope": "nope: no such file",
    "reproduce async --results x --size 1GiB": "--size: --results meas",
    "reproduce async --results x --repeat 7": "leave out --repeat",
    "doctor --target=": "--target '': names nothing",
    "doctor --target s3://bucket": "s3://bucket: is a bucket",
    "writers --target ftp://x": "ftp:// is not known; give a directory, or s3://bucket/prefix",
    "exec --config no.toml -- true": "no.toml: no such file; iobench auto",
    "exec --config hybrid": "Missing argument '-- COMMAND...'",
    "exec -- true": "Missing option '--config'",
    "exec --config odirect,buffered -- true": "names 2 writers; give exactly one",
    "exec --config null -- true": "writer 'null' stores nothing; choose one that stores files",
    "exec --config hybrid --report /dev/null -- true": "is a device, which a writer would replace",
    "exec --config hybrid -- nope-program": "nope-program: cannot be run",
    "exec --config hybrid --report missing/x.json -- true": "missing",
    "export nope -o x": "nope: does not exist",
    "export empty -o x": "empty",
    "verify nope": "nope: does not exist",
    "verify text.txt": "text.txt: no checkpoint was recognised; iobench verify reads",
    "verify text.txt --writer nope": "unknown writer 'nope'. Known: aiofiles",
    "offload show nope": "nope",
    "offload export empty -o x.pt": "empty",
    "tiers nope": "nope",
    "replicas nope": "No such command 'nope'; see iobench replicas --help",
    "workloads lsit": "No such command 'lsit'; did you mean 'list'? See iobench",
    "workloads show nope": "unknown workload 'nope'. Known: bloom-3b",
    "workloads import nope": "nope: does not exist",
    "workloads import empty": "empty: there are no files here",
    "results scrub nope -o x.jsonl": "nope: no such file",
    "results scrub run.jsonl -o run.jsonl": "run.jsonl exists and is not overwritten",
    "s3 list-uploads nope": "nope",
    "s3 abort-uploads s3://bucket/x --older-than 5": "--older-than '5' has no unit",
}
"""The command, and words of its answer."""


@pytest.mark.parametrize("command", CASES)
def test_wrong_input(command: str, iobench_inside, tmp_path) -> None:
    for name in ("run.jsonl", "same.jsonl"):
        shutil.copy(_RECORD, tmp_path / name)
    shutil.copy(_TRAINING, tmp_path / "train.jsonl")
    (tmp_path / "text.txt").write_text("text\n")
    (tmp_path / "my.toml").write_text('schema = "iobench.writer/1"\nwriter = "buffered"\n')
    shutil.copy(_TINY, tmp_path)
    (tmp_path / "empty").mkdir()
    before = sorted(os.listdir(tmp_path))
    done = iobench_inside(*command.split(), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith(f"iobench {command.split()[0]}: ")
    assert done.stderr.count("\n") == 1, done.stderr
    assert CASES[command] in done.stderr
    assert sorted(os.listdir(tmp_path)) == before


def test_every_verb_is_in_the_table() -> None:
    group = get_command(app)
    assert {command.split()[0] for command in CASES} == {*getattr(group, "commands", ())}
    assert len(CASES) >= 40
