"""Writers that show what several processes do at once, as a package with entry points."""

from pathlib import Path

_MEDDLING = """
import os, time
from iobench.writers.buffered import BufferedWriter

class MeetingWriter(BufferedWriter):
    name = "meeting"
    summary = "goes on when the other process has begun as well"

    def write_many(self, images, target, **options):
        if "job-" in str(target):
            place, _, number = str(target).rpartition("/job-")
            open(f"{place}/met-{number}", "w").close()
            deadline = time.monotonic() + 60
            while not os.path.exists(f"{place}/met-{1 - int(number)}"):
                assert time.monotonic() < deadline, "no process came"
                time.sleep(0.01)
        return super().write_many(images, target, **options)

class StuckWriter(BufferedWriter):
    name = "stuck"
    summary = "never ends its save in the second process, and tells when it has begun"

    def write_many(self, images, target, **options):
        if "step" in str(target) and str(target).endswith("job-1"):
            open(os.environ["STUCK"], "w").close()
            time.sleep(600)
        return super().write_many(images, target, **options)

class LateWriter(BufferedWriter):
    name = "late"
    summary = "takes twice as long in the last process as in all others"

    def write_many(self, images, target, **options):
        began = time.monotonic()
        done = super().write_many(images, target, **options)
        place, _, number = str(target).rpartition("/job-")
        if place and "step" in place:
            open(f"{place}/done-{number}", "w").close()
            last = int(os.environ["WORLD_SIZE"]) - 1
            if int(number) == last:
                while not all(os.path.exists(f"{place}/done-{n}") for n in range(last)):
                    assert time.monotonic() < began + 60, "the others did not end"
                    time.sleep(0.001)
                time.sleep(time.monotonic() - began)
        return done

class FailingWriter(BufferedWriter):
    name = "failing"
    summary = "cannot, in the second process"

    def write_many(self, images, target, **options):
        if "step" in str(target) and str(target).endswith("job-1"):
            raise OSError(28, "No space left on device", str(target))
        return super().write_many(images, target, **options)

class WrongWriter(BufferedWriter):
    name = "wrong"
    summary = "turns a byte of every file over, in the second process"

    def read_ranges(self, image, target, ranges):
        done = super().read_ranges(image, target, ranges)
        if str(target).endswith("job-1"):
            max(image.segments, key=lambda segment: segment.length).memory[0] ^= 1
        return done
"""


def meddling(tmp_path: Path) -> str:
    """A directory with a package of five writers; for PYTHONPATH."""
    package = tmp_path / "site"
    (package / "meddling-1.dist-info").mkdir(parents=True)
    (package / "meddling-1.dist-info/METADATA").write_text("Name: meddling\nVersion: 1\n")
    (package / "meddling-1.dist-info/entry_points.txt").write_text(
        "[iobench.writers]\n"
        + "".join(
            f"{n.lower()} = meddling:{n}Writer\n"
            for n in ("Meeting", "Stuck", "Late", "Failing", "Wrong")
        )
    )
    (package / "meddling.py").write_text(_MEDDLING)
    return str(package)
