#!/usr/bin/env bash
. "$(dirname "$0")/fineweb.sh"
