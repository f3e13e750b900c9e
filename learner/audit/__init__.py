"""Checks whether actors act as they were told: computes steps again, holds back what cannot be true, finds drift."""
