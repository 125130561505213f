"""Rules, findings, and comparison of runs"""
