"""Internals of the `s3` writer: client, uploads, downloads, errors and checksums."""
