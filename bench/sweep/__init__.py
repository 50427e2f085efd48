"""`octavo sweep` and `octavo tune`: many configurations of one file on one workload."""
