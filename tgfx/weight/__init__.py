"""Granularity "weight": one gate per entry of every weight of a convolution or fully-connected layer."""
