"""Simulated GPUs: kernels as plain numbers, devices as published figures, time and power from both."""
