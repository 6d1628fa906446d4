"""One file per model family over shared sharded layers."""
