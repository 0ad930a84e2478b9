"""The floor plan of llmc/: floors.py [TREE [BUILD]] checks a tree, and the objects in its build directory, against
TREE/llmc/floors, and prints a line for each fault. The exit code is 1 if there is one.

    includes    a file of llmc/ includes only its own folder and folders below it
    symbols     an object of the library takes no symbol that only an object of a higher floor defines (nm)
    functions   no function is longer than 60 lines, no main longer than 10
Prints the lines of each floor at the end."""
import pathlib
import re
import subprocess
import sys

tree = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ".")
build = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else None
FUNCTION_LINES, MAIN_LINES = 60, 10
SOURCES = (".c", ".h", ".cu", ".cuh", ".def")

floors = [line.split()[0] for line in (tree / "llmc/floors").read_text().splitlines() if line and line[0] != "#"]
height = {floor: -row for row, floor in enumerate(floors)}
faults = []


def floor_of(path):
    return path.relative_to(tree / "llmc").parts[0]


def check_includes(path):
    for number, line in enumerate(path.read_text().splitlines(), 1):
        include = re.match(r'\s*#\s*include\s+"(?:([a-z]+)/)?([^"]+)"', line)
        if not include:
            continue
        if include[1] not in height:
            faults.append(f'{path}:{number}: include "{include[1]}/{include[2]}" names no floor of llmc/floors')
        elif height[include[1]] > height[floor_of(path)]:
            faults.append(f'{path}:{number}: {floor_of(path)}/ includes "{include[1]}/{include[2]}", of a floor above')


def symbols(object_file):
    """Names that the object defines, and that it takes from others."""
    lines = subprocess.run(["nm", "-P", "-g", object_file], capture_output=True, text=True, check=True).stdout
    rows = [line.split()[:2] for line in lines.splitlines()]
    return {name for name, kind in rows if kind not in "Uw"}, {name for name, kind in rows if kind == "U"}


def check_symbols(objects):
    """objects: path -> floor."""
    table = {path: symbols(path) for path in objects}
    homes = {}
    for path, (defined, _) in table.items():
        for name in defined:
            homes.setdefault(name, set()).add(objects[path])
    for path, (_, taken) in table.items():
        for name in sorted(taken):
            if name in homes and all(height[home] > height[objects[path]] for home in homes[name]):
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


def lines_of(paths):
    return sum(path.read_text().count("\n") for path in paths)


files = sorted(path for path in (tree / "llmc").rglob("*") if path.suffix in SOURCES)
for path in files:
    if floor_of(path) not in height:
        faults.append(f"{path}: no floor of llmc/floors")
    else:
        check_includes(path)
for path in files + sorted(tree.glob("train_gpt2.c*")) + sorted(tree.glob("data/*.c")):
    check_functions(path)
if build:
    check_symbols({str(path): path.relative_to(build / "llmc").parts[0] for path in sorted((build / "llmc").rglob("*.o"))})
for fault in faults:
    print(fault)
if not faults and str(tree) == ".":
    rooms = {f"llmc/{floor}": [path for path in files if floor_of(path) == floor] for floor in floors}
    for name in ("train_gpt2.c", "train_gpt2.cu", "data", "scripts"):
        listed = subprocess.run(["git", "-C", tree, "ls-files", name], capture_output=True, text=True).stdout.split()
        rooms[name] = [tree / path for path in listed]
    print("  lines: " + ", ".join(f"{name} {lines_of(paths)}" for name, paths in rooms.items()) +
          f"; {sum(map(lines_of, rooms.values()))} in all")
sys.exit(bool(faults))
