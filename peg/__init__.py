"""peg serves open-weight language models from one process that fails closed. Start reading at `peg/engine.py`."""
