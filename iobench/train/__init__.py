"""What checkpoints cost a training job: the interval, goodput and lost work from measured times.

`job` and `costs` say what is planned for, `intervals` and `goodput` are the formulas, `simulation`
checks them, `measured` takes the times from result files, `forecast` puts them together.
`session` measures training itself with and without checkpoints, in a `block` per `arm`, whose
checkpoints a `saver` takes from a `trainer`. `reproduction` judges published claims by records.
"""
