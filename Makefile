PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

STDLIB = $(shell $(PYTHON) -c "import sysconfig; print(sysconfig.get_paths()['stdlib'])")
NOT_CODE := --exclude 'site-packages/*' --exclude 'test/*' --exclude '*/test/*' --exclude '*/tests/*' \
	--exclude '*/idle_test/*' --exclude 'encodings/*' --exclude 'pydoc_data/*' --exclude '*_data.py'
