"""Callbacks that bring torchember to other people's trainers, a room for each"""
