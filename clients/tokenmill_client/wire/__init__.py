"""Records and keyword arguments to protobuf and back. Protobuf stops here."""
