#include "api.h"
#include "ascend.h"
