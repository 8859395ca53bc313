"""`paceline.horovod`: Horovod's API over Paceline's transport; `import paceline.horovod.torch as hvd`."""
