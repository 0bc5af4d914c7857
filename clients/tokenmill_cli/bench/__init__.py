"""`tokenmill bench`: sends workloads to a server, takes the times, keeps and compares them."""
