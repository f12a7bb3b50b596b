# Shared by the scripts in ci/: system packages and virtual environments. Source it from the checkout's root.

PYTHON="${PYTHON:-python3}"

# System packages that a build or a test needs, installed where apt-get and the rights for it are at hand.
ensure_system_packages() {
  local missing=()
  command -v g++ >/dev/null || missing+=(g++)
  command -v git >/dev/null || missing+=(git)
  command -v "$PYTHON" >/dev/null || missing+=(python3 python3-dev)
  "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
  "$PYTHON" -c 'import os, sysconfig, sys; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' \
    2>/dev/null || missing+=(python3-dev)
  [ ${#missing[@]} -eq 0 ] && return 0
  echo "installing system packages: ${missing[*]}" >&2
  local sudo=""
  [ "$(id -u)" -eq 0 ] || sudo=sudo
  if ! command -v apt-get >/dev/null; then
    echo "error: please install ${missing[*]} (no apt-get on this machine), then run this again" >&2
    return 1
  fi
  $sudo apt-get update -qq && $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${missing[@]}"
}

require_python() {
  "$PYTHON" - <<'PY'
import sys
if sys.version_info < (3, 11):
    sys.exit(f"error: headrace needs Python 3.11 or newer, this is {sys.version.split()[0]}; set PYTHON=/path/to/python3")
PY
}

# make_venv DIR: a fresh or existing virtual environment with a current pip.
make_venv() {
  [ -x "$1/bin/python" ] || "$PYTHON" -m venv "$1"
  "$1/bin/python" -m pip install -q --disable-pip-version-check --upgrade pip
}

# make_venv_over DIR BASE: a virtual environment that sees the packages of another one, too.
make_venv_over() {
  make_venv "$1"
  local purelib='import sysconfig; print(sysconfig.get_path("purelib"))'
  echo "import site; site.addsitedir('$("$2/bin/python" -c "$purelib")')" >"$("$1/bin/python" -c "$purelib")/base.pth"
}

pip_install() {
  local venv="$1"
  shift
  "$venv/bin/python" -m pip install -q --disable-pip-version-check -c ci/constraints.txt "$@"
}
