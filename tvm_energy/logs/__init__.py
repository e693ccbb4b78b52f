"""Work on logs as files: load, verify, describe, merge, prune, convert. Nothing here needs TVM."""
