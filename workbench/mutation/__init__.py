"""Break code on purpose: is it noticed?"""
