"""The loggers that come with Paceline. Each imports its library when it is first fed."""
