"""CUDA C++ sources, installed as the package ``ep_comm._kernels``; no Python code lives here."""
