"""The list of packages, which pyproject.toml alone cannot express.

``kernels/`` lies at the top of the repository, where readers look for CUDA sources, but is installed
as the package ``ep_comm._kernels``, so that an installed ep_comm finds it from any directory.
"""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["ep_comm", "ep_comm.*"]), "ep_comm._kernels"],
    package_dir={"ep_comm._kernels": "kernels"},
    package_data={"ep_comm": ["py.typed"], "ep_comm._kernels": ["*.cu", "*.cuh"]},
)
