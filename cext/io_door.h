/* The Python side of _io: one file for each group of functions; io_door.c joins their methods. */
#ifndef DELTAFIN_IO_DOOR_H
#define DELTAFIN_IO_DOOR_H

#include "door.h"

extern PyMethodDef io_pack_methods[];
extern PyMethodDef io_read_methods[];

#endif
