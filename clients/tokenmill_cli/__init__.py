"""`tokenmill`: the command line. Commands are imported when they are used, so that each starts as fast as it can."""

import os

# gRPC writes of connections that come and go to standard error, in the middle of what a command prints. It reads this when it is
# imported, so it stands before every other import.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
