"""The bench: honest numbers. What its parts keep:

- the clock stops when the data is durable: file syncs, directory syncs and the rename are inside
- restores start from a proved cold page cache, and every tensor is compared with what was saved
- source data is random, different in every checkpoint, and made outside the clock
- writers and fio jobs are interleaved in random order within each repetition
- every sample is kept, with the counters of process, machine and device around it
"""
