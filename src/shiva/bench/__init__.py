"""`shiva bench`: speed, as ratios within one run, with the environment beside each figure."""
