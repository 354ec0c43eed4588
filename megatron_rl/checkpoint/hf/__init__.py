"""Hugging Face checkpoints in and out, a piece at a time: no rank ever holds more than it needs.

    load.py       a directory into a model, or into a checkpoint of ours
    save.py       a model, or a checkpoint of ours, into a directory
    quantize.py   a directory in full precision into one of 8 bits
"""
