"""Reports that people show others: one HTML file with charts, or a single picture.

Needs the extra `report`: altair, jinja2 and vl-convert.
"""
