"""`octavo simulate`: traces replayed through the code that serves, on a simulated executor."""
