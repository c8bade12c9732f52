"""Where memory lies, also memory that may only be read, as the node hands it out for stores."""

import ctypes

_SIMPLE = 0  # PyBUF_SIMPLE


class _PyBuffer(ctypes.Structure):
    """``Py_buffer`` of CPython's stable ABI. https://docs.python.org/3/c-api/buffer.html"""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_void_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_get = ctypes.pythonapi.PyObject_GetBuffer
_get.argtypes = (ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int)
_get.restype = ctypes.c_int
_release = ctypes.pythonapi.PyBuffer_Release
_release.argtypes = (ctypes.POINTER(_PyBuffer),)
_release.restype = None


def address_of(memory: memoryview) -> int:
    """Of its first byte; good as long as the view is. BufferError if it is not contiguous."""
    found = _PyBuffer()
    _get(memory, ctypes.byref(found), _SIMPLE)
    address = found.buf
    _release(ctypes.byref(found))
    return address or 0
