"""Predicting latency and energy of kernels that have not been measured."""
