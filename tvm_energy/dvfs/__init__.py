"""How latency and power of a kernel move with the clock, and what follows from it."""
