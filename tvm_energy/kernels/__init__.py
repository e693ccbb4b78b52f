"""What both adapters share about kernels: workers, devices that measure, and GPU code described.

The modules here import TVM, but neither tuner, and run with MetaSchedule's TVM (0.26 and 0.27) as
well as with the last that had Ansor (up to 0.19).
"""
