"""Says what is wrong with a training, in words"""
