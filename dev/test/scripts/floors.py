"""Checks the floors of llmc/: floors.py BUILD compares this tree, and the objects in its build directory, with
llmc/floors. Prints a line for each fault, then each floor's line count. Exits with 1 if there is a fault.

    includes    a file of llmc/ includes only its own folder and folders below it
    symbols     an object of the library uses no symbol that only an object of a higher floor defines (nm)
    functions   no function is longer than 60 lines, no main longer than 10

"""
import pathlib
import re
import subprocess
import sys

FUNCTION_LINES, MAIN_LINES = 60, 10
llmc, build = pathlib.Path("llmc"), pathlib.Path(sys.argv[1], "llmc")
floors = [line.split()[0] for line in (llmc / "floors").read_text().splitlines() if line[:1] not in "#"]
height = {floor: -row for row, floor in enumerate(floors)}
faults = []


def floor_of(path, top=llmc):
    return path.relative_to(top).parts[0]


def check_includes(path):
    for number, line in enumerate(path.read_text().splitlines(), 1):
        include = re.match(r'\s*#\s*include\s+"(?:([a-z]+)/)?([^"]+)"', line)
        if include and include[1] not in height:
            faults.append(f'{path}:{number}: include "{include[1]}/{include[2]}" names no floor of llmc/floors')
        elif include and height[include[1]] > height[floor_of(path)]:
            faults.append(f'{path}:{number}: {floor_of(path)}/ includes "{include[1]}/{include[2]}", of a floor above')


def check_symbols():
    taken, homes = [], {}  # [(object, name defined elsewhere)], {name: floors that define it}
    for path in sorted(build.rglob("*.o")):
        lines = subprocess.run(["nm", "-P", "-g", path], capture_output=True, text=True, check=True).stdout
        for name, kind in (line.split()[:2] for line in lines.splitlines()):
            if kind == "U":
                taken.append((path, name))
            elif kind != "w":
                homes.setdefault(name, set()).add(floor_of(path, build))
    for path, name in taken:
        if name in homes and all(height[home] > height[floor_of(path, build)] for home in homes[name]):
            faults.append(f"{path}: takes {name} from {'/, '.join(sorted(homes[name]))}/, a floor above")


def check_functions(path):
    start = None
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if re.match(r"[A-Za-z_].*\)[^;]*\{$", line) and not line.startswith(("typedef", "struct", "enum", "extern")):
            start, name = number, re.search(r"(\w+)\(", line)
        elif re.match(r"[A-Za-z_][^;={]*\($|[A-Za-z_][^;={]*\([^)]*,$", line):
            start, name = number, re.search(r"(\w+)\(", line)
        elif line == "}" and start:
            most = MAIN_LINES if name and name[1] == "main" else FUNCTION_LINES
            if number - start + 1 > most:
                faults.append(f"{path}:{start}: {name[1] if name else '?'} has {number - start + 1} lines, more than {most}")
            start = None


files = sorted(path for path in llmc.rglob("*") if path.suffix in (".c", ".h", ".cu", ".cuh", ".def"))
for path in files:
    check_includes(path)
for path in files + sorted(pathlib.Path().glob("train_gpt2.c*")) + sorted(pathlib.Path().glob("data/*.c")):
    check_functions(path)
check_symbols()
print("".join(fault + "\n" for fault in faults), end="")
lines = {f"llmc/{floor}": sum(path.read_text().count("\n") for path in files if floor_of(path) == floor) for floor in floors}
print("  lines: " + ", ".join(f"{name} {count}" for name, count in lines.items()) + f"; {sum(lines.values())} in all")
sys.exit(bool(faults))
