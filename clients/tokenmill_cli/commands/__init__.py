"""One module a command (or group of commands), each exporting an object of the module's name."""
