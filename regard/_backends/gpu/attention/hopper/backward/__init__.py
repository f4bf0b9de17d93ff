"""dk and dv in Gluon for Hopper."""
