"""Objectives, advantages and router losses over scored positions and compact rows."""
