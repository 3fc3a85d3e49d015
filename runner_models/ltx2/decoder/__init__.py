"""The LTX-2.5 video decoder: exact, in one push or in chunks, on one rank or sharded. See docs/decoder.md."""
