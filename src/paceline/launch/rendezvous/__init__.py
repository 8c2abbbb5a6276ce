"""How processes that another launcher started find each other: torchrun, srun, mpirun."""
