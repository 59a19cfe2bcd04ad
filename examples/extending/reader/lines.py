from stillhouse.data.read.reader import DECOMPRESSES, Reader, open_bytes
from stillhouse.data.record import Record


class Lines(Reader):
    capabilities = (DECOMPRESSES,)

    @classmethod
    def read(cls, path):
        with open_bytes(path) as file:
            for number, line in enumerate(file, start=1):
                yield Record(f"{path}:{number}", {"text": line.decode().rstrip("\n")})
