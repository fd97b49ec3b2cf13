"""Tests of context parallelism: layouts alone, and child processes that talk by gloo."""
