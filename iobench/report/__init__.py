"""Result records as people and programs read them: summaries, and one renderer per format.

`summary.summarise(results.read(path))` gives a Report, `render.render(report, format, stream)`
writes it as a terminal table, JSON (`iobench.report/1`), CSV or Markdown. This module
imports nothing, so a command line can name the formats without loading numpy.
"""
