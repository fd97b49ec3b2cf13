"""The command line: `ptxemu info | run | check | exec`."""
