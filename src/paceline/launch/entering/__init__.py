"""Entering a job that another launcher started: torchrun, srun, mpirun and the like."""
