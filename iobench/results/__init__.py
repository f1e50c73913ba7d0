"""Result files: the measurements of a run as JSON Lines records, appended and never rewritten.

The schema is `iobench.result/1`, described in docs/results.md. `ResultWriter` writes a file during
the run, `read` returns its records, and `load` returns a pandas table of one or several files.
"""

from iobench.results.codec import SCHEMA, Record, from_record, to_plain, to_record
from iobench.results.file import check_new, default_path
from iobench.results.frame import load
from iobench.results.identity import config_hash, contender_of, figure_of, new_run_id, utc_now
from iobench.results.records import (
    CeilingSample,
    Cold,
    DeviceCounts,
    End,
    Environment,
    Failure,
    Interference,
    MemoryUse,
    Operation,
    Run,
    Sample,
    Series,
    Stored,
    TrainBlock,
    TrainSave,
    VariantFacts,
    Verified,
    WorkloadFacts,
    WorldFacts,
)
from iobench.results.result_file import ResultFile, ResultWriter, read
from iobench.results.setting import AxisValues, Setting
from iobench.writers.transfer import Fallback, PathCount

__all__ = [
    "SCHEMA",
    "AxisValues",
    "CeilingSample",
    "Cold",
    "DeviceCounts",
    "End",
    "Environment",
    "Failure",
    "Fallback",
    "Interference",
    "MemoryUse",
    "Operation",
    "PathCount",
    "Record",
    "ResultFile",
    "ResultWriter",
    "Run",
    "Sample",
    "Series",
    "Setting",
    "Stored",
    "TrainBlock",
    "TrainSave",
    "VariantFacts",
    "Verified",
    "WorkloadFacts",
    "WorldFacts",
    "check_new",
    "config_hash",
    "contender_of",
    "default_path",
    "figure_of",
    "from_record",
    "load",
    "new_run_id",
    "read",
    "to_plain",
    "to_record",
    "utc_now",
]
