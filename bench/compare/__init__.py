"""`octavo compare`: which of several configurations or servers is better, and how sure that is."""
