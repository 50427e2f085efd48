"""Working implementations of the server's kinds, for `octavo plugins new`."""
