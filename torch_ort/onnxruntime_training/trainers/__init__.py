"""Trainers with the interface of ONNX Runtime Training, which train a model step by step.

live.py takes an optimizer that the caller has made. v0.py and v1/ are the two generations of
ORTTrainer, which share described_trainer.py. All of them run on core.py.
"""
