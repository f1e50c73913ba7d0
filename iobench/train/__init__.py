"""Training with and without checkpoints, measured (`iobench train`).

`session` runs interleaved blocks of training. A `block` trains with one `arm`: a writer in a mode.
Its `saver` takes the checkpoints of the `trainer`. `pace` and `probe` choose the steps between two
checkpoints.
"""
