"""Attention for Hopper in Gluon: warpgroup products, bulk copies, one producer warp."""
