"Package metadata from settings.ini, in addition to pyproject.toml"
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

ini = ConfigParser()
ini.read(Path(__file__).with_name('settings.ini'), encoding='utf-8')
cfg = ini['DEFAULT']
lib = cfg['lib_name']

setup(
    version=cfg['version'], description=cfg['description'], keywords=cfg['keywords'].split(),
    author=cfg['author'], license=cfg['license'], python_requires=f">={cfg['min_python']}",
    packages=find_packages(include=[lib, f'{lib}.*']), package_data={'': ['*.pyi'], f'{lib}.show.page': ['web/*']},
    install_requires=cfg['requirements'].split(),
    extras_require={k.removesuffix('_requirements'): v.split() for k,v in cfg.items() if k.endswith('_requirements')},
    entry_points={'nbdev': [f'{lib} = {lib}._modidx:d'], 'console_scripts': cfg['console_scripts'].split()},
)
