"""Measurements of sparse_attn: ``python -m bench --help``."""
